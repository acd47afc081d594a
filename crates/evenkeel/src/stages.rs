//! Where a run's model is cut in stages: as a person says, by parameters, or by the time that units are estimated to take.

use evenkeel_balance::{Staging, best_cut};
use evenkeel_model::{Model, ParamId, UnitKind};
use evenkeel_step::{Pipeline, Strategy};
use evenkeel_train::{Cost, Restaged, Samples};

use crate::arrange::this_machine;
use crate::config::{Parallel, Settings, StageCut};
use crate::launch::Launch;
use crate::{Mistake, text};

impl Parallel {
    pub fn ranks(&self) -> usize {
        self.pp * self.dp * self.tp
    }

    /// Stages at each place of the pipeline.
    pub fn chunks_or_default(&self) -> usize {
        self.chunks.unwrap_or(self.order.usual_chunks())
    }
}

/// The pipeline of a configuration. Without a choice of layers, its stages have about as many parameters each.
pub fn pipeline(parallel: &Parallel, model: &Model, micros: usize) -> Result<Pipeline, Mistake> {
    let (stages, order) = (parallel.pp * parallel.chunks_or_default(), parallel.order);
    if parallel.pp == 1 {
        return Ok(Pipeline::default());
    }
    if !parallel.stage_layers.is_empty() {
        return Ok(Pipeline { cuts: cuts_of_layers(&parallel.stage_layers, model)?, order });
    }
    Ok(Pipeline { cuts: cuts_by_parameters(stages, model, micros)?, order })
}

/// The cuts of stages with about as many parameters each.
pub fn cuts_by_parameters(stages: usize, model: &Model, micros: usize) -> Result<Vec<usize>, Mistake> {
    let units = model.units.len();
    if units < stages {
        let what = format!("{stages} stages, but the model has {units} units: embedding, sublayers and head");
        return Err(Mistake { what, hint: Some("lower parallel.pp or parallel.chunks".to_owned()) });
    }
    let count = |id: &ParamId| model.specs[id.0].whole.iter().product::<usize>() as f64;
    let of_unit: Vec<f64> = model.units.iter().map(|unit| unit.parameters().iter().map(count).sum()).collect();
    Ok(best_cut(&vec![of_unit; stages], micros))
}

/// The cuts behind so many layers each. The first stage has the embedding too, the last one the head.
pub fn cuts_of_layers(layers: &[usize], model: &Model) -> Result<Vec<usize>, Mistake> {
    let (given, there): (usize, usize) = (layers.iter().sum(), model.config.layers.len());
    if given != there {
        let what = format!("`parallel.stage_layers` has {given} layers together, the model has {there}");
        return Err(Mistake { what, hint: Some("give all of them, each once".to_owned()) });
    }
    let first_unit_of = |layer: usize| {
        let is_first = |kind: UnitKind| match kind {
            UnitKind::Attention(index) | UnitKind::Layer(index) => index == layer,
            UnitKind::Head => layer == there,
            UnitKind::Embedding | UnitKind::Mlp(_) | UnitKind::TokenInput(_) => false,
        };
        model.units.iter().position(|unit| is_first(unit.kind)).expect("every layer has a first unit")
    };
    let mut before = 0;
    let mut cuts = Vec::new();
    for count in &layers[..layers.len() - 1] {
        before += count;
        cuts.push(first_unit_of(before));
    }
    if cuts.windows(2).any(|pair| pair[0] >= pair[1]) {
        let what = format!("`parallel.stage_layers` {layers:?} leaves a stage with nothing to compute");
        let hint =
            "only the first stage, which has the embedding, and the last, which has the head, may be without layers";
        return Err(Mistake { what, hint: Some(hint.to_owned()) });
    }
    Ok(cuts)
}

/// The launch's pipeline with stages that take equally long by an estimate, if the configuration wants that; see [`cuts_by_cost`].
pub fn by_cost(
    settings: &Settings,
    model: &Model,
    launch: &Launch,
    fullness: impl Fn(&Strategy) -> Vec<f64>,
) -> Pipeline {
    let pipeline = launch.strategy.pipeline.clone();
    if !is_by_cost(&settings.parallel) {
        return pipeline;
    }
    Pipeline { cuts: cuts_by_cost(model, launch, settings.data.sequence, fullness), ..pipeline }
}

/// The cuts of the launch's stages that take equally long by an estimate, on sequences of so many tokens, and fit in memory: by rank,
/// `fullness` is what it needs over what it has. If none fits, memory does not count.
pub fn cuts_by_cost(
    model: &Model,
    launch: &Launch,
    sequence: usize,
    fullness: impl Fn(&Strategy) -> Vec<f64>,
) -> Vec<usize> {
    let strategy = &launch.strategy;
    let staging = staging(model, launch, sequence);
    let rates = this_machine(launch).flops_per_s;
    let slowness = by_place(strategy, &rates.iter().map(|rate| rates[0] / rate).collect::<Vec<f64>>());
    let of_places = |cuts: &[usize]| by_place(strategy, &fullness(&strategy.clone().cut_at(cuts)));
    let any = || staging.best_cut(&slowness, &|_| vec![0.0; strategy.pp]).expect("everything fits");
    staging.best_cut(&slowness, &of_places).unwrap_or_else(any)
}

/// By place of the pipeline: the largest number of its ranks.
pub fn by_place(strategy: &Strategy, of_ranks: &[f64]) -> Vec<f64> {
    let mut of_places = vec![0.0f64; strategy.pp];
    for (rank, number) in of_ranks.iter().enumerate() {
        let place = &mut of_places[strategy.mesh().place(rank)];
        *place = place.max(*number);
    }
    of_places
}

/// What units take in the launch's stages, by an estimate, if sequences have so many tokens.
pub fn staging(model: &Model, launch: &Launch, sequence: usize) -> Staging {
    let blank = Samples::blank(model.config.input, launch.strategy.micro_batch, sequence);
    evenkeel_train::staging(model, &launch.strategy, &blank, &this_machine(launch))
}

/// Whether stages may be cut anew in a run.
pub fn may_change(settings: &Settings, model: &Model, launch: &Launch) -> bool {
    is_by_cost(&settings.parallel) && launch.keeps_ranks_apart() && model.units_can_move()
}

/// Whether the stages of a configuration follow the time that they take.
fn is_by_cost(parallel: &Parallel) -> bool {
    parallel.pp > 1 && parallel.stages == StageCut::Cost && parallel.stage_layers.is_empty()
}

/// A line about stages that were cut anew.
pub fn describe_change(model: &Model, strategy: &Strategy, restaged: &Restaged) -> String {
    let Restaged { step, recut } = restaged;
    let slow = recut.slowness.iter().enumerate().filter(|(_, slowness)| **slowness > 1.05);
    let slow: Vec<String> = slow.map(|(place, slowness)| format!("{slowness:.1}× as long at place {place}")).collect();
    let slow = match &slow[..] {
        [] => "all places are about as fast".to_owned(),
        slow => format!("a unit takes {} as at the fastest place", slow.join(" and ")),
    };
    let now = describe(model, &strategy.clone().cut_at(&recut.cuts)).expect("there are stages");
    let when = if *step == 0 { "before the first step".to_owned() } else { format!("after step {step}") };
    format!("{slow}: cut anew {when}, {:.0} % less time expected; {now}", 100.0 * (1.0 - recut.ratio))
}

/// A line about the memory of each place; none for a model in one piece.
pub fn describe_memory(strategy: &Strategy, costs: &[Cost]) -> Option<String> {
    let bytes: Vec<f64> = costs.iter().map(|cost| cost.arena_bytes as f64).collect();
    let places: Vec<String> = by_place(strategy, &bytes).into_iter().map(|bytes| text::mib(bytes as u64)).collect();
    (strategy.pp > 1).then(|| format!("tensors of each rank at these places: {}", places.join(" | ")))
}

/// A line about the stages; none for a model in one piece.
pub fn describe(model: &Model, strategy: &Strategy) -> Option<String> {
    let (pipeline, units) = (&strategy.pipeline, model.units.len());
    let stage = |stage: usize| {
        let run = pipeline.units(stage, units);
        let [first, last] = [run.start, run.end - 1].map(|unit| model.units[unit].kind.to_string());
        if run.len() == 1 { first } else { format!("{first} to {last}") }
    };
    let stages: Vec<String> = (0..pipeline.stages()).map(stage).collect();
    (!pipeline.is_absent()).then(|| format!("stages ({}): {}", pipeline.order.name(), stages.join(" | ")))
}
