//! What strategies take at least, and where their stages are cut, from one micro-batch counted unit by unit.

use std::rc::Rc;

use evenkeel_balance::{StagePlace, Staging, UnitCost};
use evenkeel_model::ZeroStage;
use evenkeel_plan::{PlaceTime, Prices, UnitTime, unit_times};
use evenkeel_step::{BucketIdx, Keeping, Pipeline, Strategy, Work};
use evenkeel_train::Cost;

use super::{Judging, Source};

/// Of the bytes that units keep of a sequence, those that they keep of each of several, at least.
const ACTUALLY_KEPT: f64 = 0.95;

/// Units of a model at least, if those at its ends are a small share of it.
const LEAST_GATHERED_UNITS: usize = 24;

impl Judging<'_, '_> {
    /// By place of the pipeline: what a micro-batch takes there, unit by unit, on the slowest rank of a replica.
    pub(super) fn times(&self, strategy: &Strategy, prices: &dyn Prices, replica: usize) -> Vec<Rc<[UnitTime]>> {
        let (mesh, sample) = (strategy.mesh(), self.job.sample_in_one_place(strategy));
        let first_alike = self.job.first_alike(strategy);
        let arrangement = (&strategy.cut, strategy.micro_batch, strategy.arrangement, strategy.accumulate.min(2));
        let at_place = |place: usize| {
            let members = mesh.tensor_ranks(mesh.rank(place, replica, 0));
            let link = prices.exchange_s(members[0], Work::AllReduce, 1 << 20, &members);
            let of_shard = |shard: usize, rank: usize| {
                let key = format!("{:?} {link:?} {arrangement:?} {shard}", prices.place(rank));
                if let Some(known) = self.times.borrow().get(&key) {
                    return known.clone();
                }
                let counted = &sample.at(0, shard).counted;
                let short = unit_times(prices, members[0], rank, counted, self.job.model.units.len());
                let times: Rc<[UnitTime]> = sample.alike.iter().map(|&unit| short[unit]).collect();
                self.times.borrow_mut().insert(key, times.clone());
                times
            };
            // Ranks that are alike take as long.
            let kind = |&rank: &usize| (prices.place(rank), first_alike[mesh.shard(rank)], rank);
            let mut ranks: Vec<(String, usize, usize)> = members.iter().map(kind).collect();
            ranks.dedup_by(|one, other| (&one.0, one.1) == (&other.0, other.1));
            let times = ranks.iter().map(|&(_, shard, rank)| of_shard(shard, rank));
            times.max_by(|a, b| total_s(a).total_cmp(&total_s(b))).expect("there is a shard")
        };
        (0..strategy.pp).map(at_place).collect()
    }

    /// By place: what its parameters take at least, if it has this share of those that are trained, and the first place has the
    /// embedding. Times that were measured for other sizes bound nothing.
    pub(super) fn states(
        &self,
        strategy: &Strategy,
        prices: &dyn Prices,
        replica: usize,
        shares: &[f64],
    ) -> Vec<PlaceTime> {
        const GRADIENT_BYTES: f64 = 4.0;
        let (model, mesh) = (&self.job.model, strategy.mesh());
        let Source::Cluster(_) = self.source else { return vec![PlaceTime::default(); shares.len()] };
        let passes = self.passes(strategy, prices, replica);
        let elements = model.trained_count() as f64 / mesh.tp as f64;
        let embedding = if model.config.tied { 0.0 } else { self.job.trained_shares()[0] };
        let sample = self.job.sample_in_one_place(strategy);
        let sampled = sample.at(0, 0);
        let of_place = |(place, &share): (usize, &f64)| {
            let rank = mesh.rank(place, replica, 0);
            let exchange_s = |work: Work, bytes: f64| {
                let members = mesh.data_ranks(rank);
                if mesh.dp == 1 { 0.0 } else { prices.exchange_s(rank, work, bytes as u64, &members).unwrap_or(0.0) }
            };
            let reduce_s =
                |share: f64| exchange_s(Work::ReduceGradients(BucketIdx(0)), GRADIENT_BYTES * elements * share);
            let tasks = sampled.counted.program.tasks.iter().zip(&sampled.counted.counts);
            let tail = tasks.filter(|(task, _)| task.work.is_of_tail());
            let update_s: f64 = tail.filter_map(|(task, kernels)| prices.task_s(rank, task, kernels)).sum();
            let (split, gathered) = match strategy.zero {
                ZeroStage::Nothing => (1, 0.0),
                ZeroStage::State | ZeroStage::Gradients => (mesh.dp, strategy.dtype.size_bytes() as f64 * elements),
                ZeroStage::Values => (mesh.dp, 0.0),
            };
            let gather_s = exchange_s(Work::GatherUpdated(BucketIdx(0)), gathered * share);
            // What a chain's end has gathered for one pass may stay for the next one, but that is much less than a whole chain.
            let is_gathered =
                strategy.zero == ZeroStage::Values && strategy.pp == 1 && model.units.len() > LEAST_GATHERED_UNITS;
            let gathered = if is_gathered { strategy.dtype.size_bytes() as f64 * elements * share } else { 0.0 };
            PlaceTime {
                gathers_s: exchange_s(Work::GatherParameters(BucketIdx(0)), gathered),
                reduce_s: reduce_s(share),
                last_reduce_s: if place == 0 { reduce_s(embedding) } else { 0.0 },
                tail_s: update_s * share / sampled.trained_share / split as f64 + gather_s,
                ..passes[place]
            }
        };
        shares.iter().enumerate().map(of_place).collect()
    }

    /// By place of a replica: its passes, wherever stages are cut. Where not all is trained, some gradients may not be passed.
    fn passes(&self, strategy: &Strategy, prices: &dyn Prices, replica: usize) -> Vec<PlaceTime> {
        let (model, mesh, pipeline) = (&self.job.model, strategy.mesh(), &strategy.pipeline);
        let mut times = vec![PlaceTime::default(); strategy.pp];
        let parts = strategy.arrangement.parts.min(strategy.micro_batch);
        let bytes = self.job.tokens(strategy) * model.config.hidden * strategy.dtype.size_bytes() / parts;
        let is_all_trained = model.trained_count() == model.parameter_count();
        for stage in 1..pipeline.stages() {
            let [from, to] = [stage - 1, stage].map(|stage| pipeline.place(stage, strategy.pp));
            if from == to {
                continue;
            }
            let members = [from, to].map(|place| mesh.rank(place, replica, 0));
            let pass_s = |work: Work| prices.exchange_s(members[0], work, bytes as u64, &members).unwrap_or(0.0);
            let forward_s = pass_s(Work::Pass);
            let gradient_s = if is_all_trained { pass_s(Work::PassGradient) } else { 0.0 };
            [from, to].into_iter().for_each(|place| times[place].passes_s += parts as f64 * (forward_s + gradient_s));
            if stage < strategy.pp {
                times[stage].passes_before_s = times[stage - 1].passes_before_s + forward_s;
                times[stage].passes_behind_s = times[stage - 1].passes_behind_s + gradient_s;
            }
        }
        times
    }

    /// Stages of units that take so long and need so much, and by place how much longer than at the first one.
    pub(super) fn staging(&self, strategy: &Strategy, times: &[Rc<[UnitTime]>]) -> (Staging, Vec<f64>) {
        let (pipeline, sample) = (&strategy.pipeline, self.job.sample_in_one_place(strategy));
        let (counted, units) = (&sample.at(0, 0).counted, times[0].len());
        let mut flops = vec![0.0; units];
        let tasks = counted.program.tasks.iter().zip(&counted.counts);
        for (task, kernels) in tasks.filter(|(task, _)| !task.work.is_of_tail()) {
            flops[task.unit.0] += kernels.flops() as f64;
        }
        let first_s = total_s(&times[0]);
        let state_bytes = self.job.least_state_bytes(&strategy.clone().in_stages(1, Pipeline::default()))[0];
        let (kept_bytes, shares) = (self.job.kept_bytes(strategy), self.job.trained_shares());
        let unit = |unit: usize| UnitCost {
            // Nothing may be measured yet: operations say enough to begin with.
            seconds: if first_s > 0.0 { times[0][unit].compute_s() } else { flops[sample.alike[unit]] },
            state_bytes: state_bytes * shares[unit],
            kept_bytes: kept_bytes[unit],
        };
        let slowness = |times: &Rc<[UnitTime]>| if first_s > 0.0 { total_s(times) / first_s } else { 1.0 };
        let kept_micros = self.keeping(strategy).most_micros.clone().into_iter().enumerate();
        let stages = kept_micros
            .map(|(stage, kept_micros)| StagePlace { place: pipeline.place(stage, strategy.pp), kept_micros });
        let units = (0..units).map(unit).collect();
        let staging = Staging { stages: stages.collect(), units, micros: strategy.accumulate };
        (staging, times.iter().map(slowness).collect())
    }

    /// Cuts for the shortest step, if memory is no matter. Stages of ZeRO, parts and the stream change nothing about them, nor do layers
    /// that are computed again as a whole, since units and places compare as before.
    pub(super) fn best_cuts(&self, strategy: &Strategy, times: &[Rc<[UnitTime]>], first_place: &str) -> Vec<usize> {
        let Strategy { pp, micro_batch, accumulate, arrangement, cut, pipeline, .. } = strategy;
        let slowness = times.iter().map(|place| format!("{:.3}", total_s(place) / total_s(&times[0])));
        let slowness = slowness.collect::<Vec<_>>().join(" ");
        let computed = (micro_batch, arrangement.recompute, &cut.weights, &cut.uncut, first_place, slowness);
        let key = format!("{:?}", (pp, accumulate, pipeline.order, computed));
        let found = || {
            let (staging, slowness) = self.staging(strategy, times);
            staging.best_cut(&slowness, &|_| vec![0.0; *pp]).expect("everything fits")
        };
        self.cuts.borrow_mut().entry(key).or_insert_with(found).clone()
    }

    /// Of the fullest rank, at least.
    pub(super) fn least_fullness(&self, strategy: &Strategy) -> f64 {
        let (mesh, pipeline) = (strategy.mesh(), &strategy.pipeline);
        let (state_bytes, kept_bytes) = (self.job.least_state_bytes(strategy), self.job.kept_bytes(strategy));
        let of_stage = |stage: usize| kept_bytes[pipeline.units(stage, kept_bytes.len())].iter().sum();
        let of_stages: Vec<f64> = (0..pipeline.stages()).map(of_stage).collect();
        let kept = self.keeping(strategy).least_bytes(&of_stages);
        let bytes: Vec<f64> = state_bytes.iter().zip(&kept).map(|(state, kept)| state + kept).collect();
        let cost = |rank: usize| Cost { arena_bytes: bytes[mesh.place(rank)] as u64, ..Cost::default() };
        let costs: Vec<Cost> = (0..strategy.ranks()).map(cost).collect();
        self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max)
    }

    /// The same wherever stages are cut: all ranks together have no less than all need. Units keep in proportion to the sequences.
    pub(super) fn least_fullness_of_any_cut(&self, strategy: &Strategy) -> f64 {
        let of_sequence = Strategy { micro_batch: 1, accumulate: strategy.accumulate.min(2), ..strategy.clone() };
        let of_sequence = of_sequence.in_stages(1, Pipeline::default());
        let one_part = of_sequence.clone().arranged(of_sequence.arrangement.in_parts(1));
        let kept_micros = self.keeping(strategy).most_micros.iter().copied().min().unwrap_or(1);
        let kept_bytes: f64 = self.job.kept_bytes(&one_part).iter().sum();
        let kept_bytes = ACTUALLY_KEPT * kept_bytes * (kept_micros * strategy.micro_batch) as f64;
        let bytes = (self.job.least_state_bytes(&one_part)[0] + kept_bytes) / strategy.pp as f64;
        let cost = Cost { arena_bytes: bytes as u64, ..Cost::default() };
        let fullness = self.fullness(strategy, &vec![cost; strategy.ranks()]);
        fullness.len() as f64 / fullness.iter().map(|fullness| 1.0 / fullness).sum::<f64>()
    }

    pub(super) fn keeping(&self, strategy: &Strategy) -> Rc<Keeping> {
        let Strategy { pp, accumulate, ref pipeline, .. } = *strategy;
        let found = || Rc::new(pipeline.keeping(pp, accumulate));
        let key = (pipeline.order.name(), pipeline.stages(), pp, accumulate);
        self.keeping.borrow_mut().entry(key).or_insert_with(found).clone()
    }
}

fn total_s(times: &Rc<[UnitTime]>) -> f64 {
    times.iter().map(UnitTime::compute_s).sum()
}
