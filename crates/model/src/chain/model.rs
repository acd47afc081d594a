//! Models: chains of units and the lists of their parameters.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use evenkeel_device::DeviceKind;

use crate::adapter::{AdapterConfig, AdapterFolder, Adapters, Ends};
use crate::chain::adapted::{AdaptedWeight, LinearAdapter, make_room};
use crate::chain::adapted_experts::ExpertAdapter;
use crate::chain::body::Body;
use crate::chain::build::{EMBED, build};
use crate::chain::entry::Join;
use crate::chain::experts::{ExpertMatrix, Experts};
use crate::chain::head::Head;
use crate::chain::linear::Linear;
use crate::chain::op::Op;
use crate::chain::unit::{Sublayer, Unit, UnitKind};
use crate::config::Config;
use crate::config::family::Names;
use crate::error::Error;
use crate::nf4::{self, PackedLayers};
use crate::parameters::bucket::{Bucket, buckets};
use crate::parameters::joined::JoinedWeight;
use crate::parameters::{ParamId, ParamSpec};
use crate::sharding::shard::{Cut, Shard};

/// A network, one shard of it, or a stage of a shard: its parameters and its chain of units.
#[derive(Clone, Debug)]
pub struct Model {
    pub config: Config,
    pub shard: Shard,
    /// The devices that it is for.
    pub kind: DeviceKind,
    /// The parameters of the whole network, so that all stages number them alike. A stage holds nothing of those that it does not
    /// use.
    pub specs: Vec<ParamSpec>,
    /// Embedding, the layers' sublayers in order, head; stages have some of them.
    pub units: Vec<Unit>,
    /// The runs of the chain that these units are, in order; the whole chain is one.
    pub stages: Vec<Stage>,
    /// How the parameters lie side by side.
    pub buckets: Vec<Bucket>,
}

/// A run of a chain's units.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Their numbers in the whole chain.
    pub units: Range<usize>,
    /// Joins the last unit's output to the stream that the stage passes on; the last stage passes nothing on.
    pub exit: Option<Join>,
}

impl Model {
    pub fn from_json(json: &serde_json::Value) -> Result<Model, Error> {
        Ok(Model::new(Config::from_json(json)?))
    }

    /// The whole model.
    pub fn new(config: Config) -> Model {
        let shard = Shard::whole(&config);
        Model::of_shard(config, shard, DeviceKind::Cpu, |_| true)
    }

    /// The shards of this model.
    pub fn cut(&self, cut: &Cut) -> Result<Vec<Model>, Error> {
        assert!(self.is_whole_chain(), "a model is cut in shards before it is cut in stages");
        let shards = Shard::cut(&self.config, cut)?;
        let models: Vec<Model> = shards.into_iter().map(|shard| self.rebuilt(shard, self.kind)).collect();
        let packed = models.iter().flat_map(|model| &model.specs).filter(|spec| spec.is_packed);
        packed.into_iter().try_for_each(nf4::check_cut)?;
        Ok(models)
    }

    /// The same model with its linear layers, the head excepted, frozen and held in 4 bits.
    pub fn packed(&self) -> Model {
        if self.config.packing.is_some() { self.clone() } else { self.packed_as(PackedLayers::default()) }
    }

    pub(crate) fn packed_as(&self, packing: PackedLayers) -> Model {
        assert!(self.config.adapters.is_none(), "a base is packed before it is adapted");
        let config = Config { packing: Some(Arc::new(packing)), ..self.config.clone() };
        let shard = Shard::whole(&config);
        Model::of_shard(config, shard, self.kind, |_| true)
    }

    /// Whether some of its weights are held in 4 bits.
    pub fn is_packed(&self) -> bool {
        self.specs.iter().any(|spec| spec.is_packed)
    }

    /// The model for such devices. On a GPU its head treats more rows at a time, and what belongs to an adapter lies beside what
    /// belongs to its layer. Dry runs use the same model, so they take the same memory.
    pub fn for_device(&self, kind: DeviceKind) -> Model {
        assert!(self.is_whole_chain(), "a model's device is known before it is cut in stages");
        self.rebuilt(self.shard.clone(), kind)
    }

    /// Refuses devices that cannot compute with it.
    pub fn check_device(&self, kind: DeviceKind) -> Result<(), Error> {
        let head_dim = self.config.head_dim;
        match kind.widest_head().filter(|&most| head_dim > most) {
            None => Ok(()),
            Some(most) => Err(Error::WideHeads { head_dim, most }),
        }
    }

    fn rebuilt(&self, shard: Shard, kind: DeviceKind) -> Model {
        Model::of_shard(self.config.clone(), shard, kind, |id| self.specs[id.0].is_trained)
    }

    fn of_shard(config: Config, shard: Shard, kind: DeviceKind, is_trained: impl Fn(ParamId) -> bool) -> Model {
        let (specs, units) = build(&config, &shard, kind);
        let stages = vec![Stage { units: 0..units.len(), exit: None }];
        let model = Model { config, shard, kind, specs, units, stages, buckets: Vec::new() };
        model.training(|id, _| is_trained(id))
    }

    /// The same model with adapters: training changes these, and the modules that are trained whole.
    pub fn adapted(&self, mut config: AdapterConfig) -> Result<Model, Error> {
        if self.config.family.classifier.is_some() {
            // PEFT names the heads of all classifiers of texts.
            const HEADS: [&str; 2] = ["classifier", "score"];
            let is_own = |module: &str| self.specs.iter().any(|spec| spec.name.starts_with(&format!("{module}.")));
            config.trained_modules.retain(|module| !HEADS.contains(&module.as_str()) || is_own(module));
        }
        let adapters = Arc::new(Adapters::new(config)?);
        let linears = self.linear_names();
        let mut config = self.config.clone();
        // A tied head keeps the base's numbers when the embedding alone is trained.
        if config.tied && !adapters.config.keeps_tie && adapters.trains(&self.specs[EMBED.0]) {
            (config.tied, config.head_begins_as_embedding) = (false, true);
        }
        config.adapters = Some(adapters.clone());
        let shard = Shard::whole(&config);
        let model = Model::of_shard(config, shard, self.kind, |_| true);
        adapters.check(&model.specs, &linears, &self.expert_names(), &self.ends())?;
        if let Some(spec) = model.specs.iter().find(|spec| spec.is_packed && adapters.trains(spec)) {
            let what = format!("`{}` is to be trained whole, but it is held in 4 bits, which cannot be", spec.name);
            return Err(Error::BadAdapter { what });
        }
        let is_trained = |id: ParamId| adapters.trains(&model.specs[id.0]);
        let adapted = model.experts().flat_map(Experts::matrices).filter(|matrix| matrix.adapter.is_some());
        if let Some(matrix) = adapted.into_iter().find(|matrix| is_trained(matrix.weight)) {
            let name = &model.specs[matrix.weight.0].name;
            let what =
                format!("`{name}` is in target_parameters and to be trained whole by modules_to_save: leave one out");
            return Err(Error::BadAdapter { what });
        }
        Ok(model.training(|_, spec| adapters.trains(spec)))
    }

    /// The same for an adapter that is yet to be trained, whose patterns must all match something.
    pub fn newly_adapted(&self, config: AdapterConfig) -> Result<Model, Error> {
        let model = self.adapted(config)?;
        let adapters = model.config.adapters.as_ref().expect("just adapted");
        let adapted = [model.adapted_names(), model.adapted_expert_names()].concat();
        adapters.check_patterns(&self.linear_names(), &adapted)?;
        Ok(model)
    }

    fn ends(&self) -> Ends {
        let Names { embed, head, .. } = self.config.family.names;
        let module = |name: &str| name.trim_end_matches(".weight").to_owned();
        Ends { embedding: module(embed), head: module(head), is_tied: self.config.tied }
    }

    /// The same classifier without the folder's head.
    pub fn with_new_head(mut self) -> Model {
        self.config.has_new_head = true;
        self
    }

    /// The layer before a classifier's head. It has no adapters.
    pub(crate) fn pooler(&self) -> Option<&'static str> {
        self.config.family.classifier.as_ref().map(|classifier| classifier.pooler)
    }

    /// The rows of the head in a saved adapter, if this is a classifier and the adapter has one.
    pub fn labels_in(&self, adapter: &AdapterFolder) -> Option<usize> {
        adapter.rows_of(self.config.family.names.head).filter(|_| self.config.input.is_classified())
    }

    /// The names of the linear layers that can be adapted, in order.
    pub fn linear_names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for linear in self.bodies().flat_map(Body::linears).filter(|linear| !linear.first) {
            let name = self.specs[linear.weight.0].name.trim_end_matches(".weight");
            if !names.iter().any(|other| other == name) {
                names.push(name.to_owned());
            }
        }
        names
    }

    /// The names of the experts' parameters that can be adapted, in order.
    pub fn expert_names(&self) -> Vec<String> {
        let matrices = self.experts().flat_map(Experts::matrices);
        matrices.map(|matrix| self.specs[matrix.weight.0].name.clone()).collect()
    }

    /// The names of those that are adapted.
    pub fn adapted_expert_names(&self) -> Vec<String> {
        let matrices = self.experts().flat_map(Experts::matrices).filter(|matrix| matrix.adapter.is_some());
        matrices.map(|matrix| self.specs[matrix.weight.0].name.clone()).collect()
    }

    /// The adapter's names for the linear layers that it adapts, in order.
    pub fn adapted_names(&self) -> Vec<String> {
        let of_linears = self.specs.iter().filter(|spec| spec.expert_factor.is_none());
        let names = of_linears.filter_map(|spec| spec.name.strip_suffix(".lora_A.weight"));
        names.map(|name| self.config.adapters.as_ref().map_or_else(|| name.to_owned(), |it| it.name_of(name))).collect()
    }

    /// The factor of each adapter's output, in order.
    pub fn adapter_scales(&self) -> Vec<f32> {
        self.adapted_weights().iter().map(|adapted| adapted.scale).collect()
    }

    pub(crate) fn adapted_weights(&self) -> Vec<AdaptedWeight> {
        let mut found: Vec<AdaptedWeight> = Vec::new();
        for linear in self.bodies().flat_map(Body::linears) {
            let Some(LinearAdapter { a, b, scale, magnitude, .. }) = linear.adapter else { continue };
            let magnitude = magnitude.map(|magnitude| magnitude.parameters);
            let (weight, transposed, rank) = (linear.weight, linear.transposed, self.specs[a.0].whole[0]);
            if !found.iter().any(|other| other.weight == weight) {
                found.push(AdaptedWeight { weight, a, b, rank, experts: 1, scale, transposed, magnitude });
            }
        }
        for experts in self.experts() {
            let transposed = experts.transposed;
            for &ExpertMatrix { weight, adapter } in experts.matrices() {
                let Some(ExpertAdapter { a, b, scale, .. }) = adapter else { continue };
                let [rows, rank] = [self.specs[a.0].whole[0], self.specs[b.0].whole[1]];
                let experts = rows / rank;
                found.push(AdaptedWeight { weight, a, b, rank, experts, scale, transposed, magnitude: None });
            }
        }
        found
    }

    fn experts(&self) -> impl Iterator<Item = &Experts> {
        self.bodies().flat_map(|body| &body.ops).filter_map(|op| match op {
            Op::Experts(experts) => Some(experts),
            _ => None,
        })
    }

    /// The frozen weights that their adapters' factors are to lie beside.
    pub(crate) fn joined_weights(&self) -> Vec<JoinedWeight> {
        let joined = |linear: &Linear| {
            let LinearAdapter { a, b, place, .. } = linear.adapter?;
            Some(JoinedWeight { weight: linear.weight, a, b, rank: self.specs[a.0].matrix[0], place: place? })
        };
        self.bodies().flat_map(Body::linears).filter_map(joined).collect()
    }

    fn bodies(&self) -> impl Iterator<Item = &Body> {
        self.units.iter().filter_map(|unit| match &unit.sublayer {
            Sublayer::Body(body) => Some(body),
            Sublayer::Head(_) => None,
        })
    }

    /// The count of what training changes, for the whole model.
    pub fn trained_count(&self) -> u64 {
        let trained = self.specs.iter().filter(|spec| spec.is_trained);
        trained.map(|spec| spec.whole.iter().product::<usize>() as u64).sum()
    }

    /// The count of what is held in 4 bits, for the whole model.
    pub fn packed_count(&self) -> u64 {
        let packed = self.specs.iter().filter(|spec| spec.is_packed);
        packed.map(|spec| spec.whole.iter().product::<usize>() as u64).sum()
    }

    /// Whether attention and MLP are one unit in some layer.
    pub fn has_whole_layers(&self) -> bool {
        self.units.iter().any(|unit| matches!(unit.kind, UnitKind::Layer(_)))
    }

    /// The same model; training changes only these parameters.
    pub fn training(mut self, is_trained: impl Fn(ParamId, &ParamSpec) -> bool) -> Model {
        for (index, spec) in self.specs.iter_mut().enumerate() {
            let is_fixed = spec.is_derived || spec.is_packed || spec.is_constant;
            spec.is_trained = !is_fixed && is_trained(ParamId(index), spec);
        }
        // Shards exchange tensors, which must have no gaps.
        if self.kind == DeviceKind::Cuda && self.shard.count == 1 {
            make_room(&mut self.units, &self.specs);
        }
        self.buckets = buckets(&self);
        self
    }

    /// The units of these numbers as a model of their own; see [`Model::stages`].
    pub fn stage(&self, units: Range<usize>) -> Model {
        self.stages(&[units])
    }

    /// Some runs of a chain as a model of their own. A stage receives the stream behind the addition at its entry, so that addition,
    /// with its norm, belongs to the stage before.
    pub fn stages(&self, stages: &[Range<usize>]) -> Model {
        assert!(self.is_whole_chain(), "a chain is cut once");
        let is_whole = matches!(stages, [units] if *units == (0..self.units.len()));
        assert!(is_whole || !self.config.hands_values_on(), "layers that hand values on are in one place");
        let stage = |units: &Range<usize>| {
            assert!(!units.is_empty() && units.end <= self.units.len(), "units {units:?} of {}", self.units.len());
            let behind = self.units.get(units.end).and_then(|unit| unit.entry.as_ref());
            Stage { units: units.clone(), exit: behind.and_then(|entry| entry.join.clone()) }
        };
        let units = stages.iter().flat_map(|units| {
            let mut run = self.units[units.clone()].to_vec();
            if units.start > 0 {
                let entry = run[0].entry.as_mut().expect("only the first unit of a chain has no entry");
                // The gradient of the stream leaves the stage, so it has no gaps.
                (entry.join, entry.output_room) = (None, 0);
            }
            run
        });
        let mut model = Model { units: units.collect(), stages: stages.iter().map(stage).collect(), ..self.clone() };
        model.forget_unused();
        model
    }

    /// Whether all that units compute with can move to another rank. Weights in 4 bits, and those with an adapter's factors beside
    /// them, are not made to.
    pub fn units_can_move(&self) -> bool {
        !self.is_packed() && self.joined_weights().is_empty()
    }

    /// Whether it has all units of its chain.
    pub fn is_whole_chain(&self) -> bool {
        matches!(&self.stages[..], [Stage { units: Range { start: 0, .. }, exit: None }])
    }

    /// The numbers of its units in the whole chain.
    pub(crate) fn unit_numbers(&self) -> impl Iterator<Item = usize> {
        self.stages.iter().flat_map(|stage| stage.units.clone())
    }

    /// The addition behind the stage that ends before this unit.
    pub fn exit(&self, before: usize) -> &Join {
        let stage = self.stages.iter().find(|stage| stage.units.end == before);
        stage.and_then(|stage| stage.exit.as_ref()).expect("a stage before the last passes its stream on")
    }

    /// The same model without the units between the first so many and the head: their likes are enough for an estimate. Units that
    /// hand values on stay together.
    pub fn shortened(&self, units: usize) -> Model {
        let head = self.units.len() - 1;
        let count = if self.config.hands_values_on() { head } else { units.min(head) };
        let units: Vec<Unit> = self.units[..count].iter().chain(&self.units[head..]).cloned().collect();
        let mut short = Model {
            config: self.config.clone(),
            shard: self.shard.clone(),
            kind: self.kind,
            specs: self.specs.clone(),
            stages: vec![Stage { units: 0..units.len(), exit: None }],
            units,
            buckets: self.buckets.clone(),
        };
        short.forget_unused();
        short
    }

    /// After so many units those of the layers are alike again: they compute the same with parameters of the same sizes.
    pub fn period(&self) -> usize {
        let layers = &self.config.layers;
        let per_layer = (self.units.len() - 2) / layers.len().max(1);
        let of_layer = |layer: usize| {
            let units = &self.units[1 + layer * per_layer..][..per_layer];
            let specs = units.iter().flat_map(Unit::parameters).map(|id| &self.specs[id.0]);
            let kinds = specs.map(|spec| (spec.matrix, spec.is_trained, spec.is_adapter, spec.is_packed));
            (layers[layer], kinds.collect::<Vec<_>>())
        };
        let all: Vec<_> = (0..layers.len()).map(of_layer).collect();
        let is_whole = self.config.hands_values_on();
        let repeats = |period: &usize| !is_whole && (*period..all.len()).all(|layer| all[layer] == all[layer - period]);
        per_layer * (1..all.len()).find(repeats).unwrap_or(all.len())
    }

    /// Holds nothing of the parameters that no unit uses.
    fn forget_unused(&mut self) {
        let used: HashSet<ParamId> = self.parameters_by_unit().into_iter().flatten().collect();
        for (index, spec) in self.specs.iter_mut().enumerate() {
            if !used.contains(&ParamId(index)) {
                spec.hold_nothing();
            }
        }
        self.buckets = buckets(self);
    }

    /// Whether training changes some of these parameters.
    pub fn trains(&self, parameters: impl IntoIterator<Item = ParamId>) -> bool {
        parameters.into_iter().any(|id| self.specs[id.0].is_trained)
    }

    /// A unit by its number in the whole chain.
    pub fn unit(&self, number: usize) -> &Unit {
        let place = self.unit_numbers().position(|other| other == number);
        &self.units[place.expect("a unit of these stages")]
    }

    /// Its layers with experts, counted among all of them.
    pub fn expert_layers(&self) -> impl Iterator<Item = usize> {
        let config = &self.config;
        let layers = self.units.iter().filter_map(|unit| match unit.kind {
            UnitKind::Mlp(index) | UnitKind::Layer(index) => Some(index),
            UnitKind::Embedding | UnitKind::Attention(_) | UnitKind::TokenInput(_) | UnitKind::Head => None,
        });
        layers.filter(|&index| config.layers[index].has_experts).map(|index| config.expert_layer(index))
    }

    /// The head. Stages before the last have none.
    pub fn head(&self) -> &Head {
        let head = self.units.last().and_then(|unit| match &unit.sublayer {
            Sublayer::Head(head) => Some(head),
            Sublayer::Body(_) => None,
        });
        head.expect("the last stage has the head")
    }

    /// The parameters that each unit computes with; those of a stage's exit count with its last unit.
    pub(crate) fn parameters_by_unit(&self) -> Vec<Vec<ParamId>> {
        let of_unit = |(unit, number): (&Unit, usize)| {
            let ends = self.stages.iter().filter(|stage| stage.units.end == number + 1);
            let exit = ends.flat_map(|stage| &stage.exit).flat_map(Join::parameters);
            unit.parameters().into_iter().chain(exit).collect()
        };
        self.units.iter().zip(self.unit_numbers()).map(of_unit).collect()
    }

    /// Whether a parameter is a matrix of a hidden layer: neither a vector, a filter nor a table, and no part of embedding and head.
    pub fn is_hidden_matrix(&self, id: ParamId) -> bool {
        let mut outer = self.units.iter().filter(|unit| matches!(unit.kind, UnitKind::Embedding | UnitKind::Head));
        let spec = &self.specs[id.0];
        let is_table = |op: &Op| matches!(op, Op::Lookup(lookup) if lookup.table == id);
        spec.shape.len() == 2
            && spec.tensors.is_empty()
            && spec.expert_factor.is_none()
            && !outer.any(|unit| unit.parameters().contains(&id))
            && !self.bodies().flat_map(|body| &body.ops).any(is_table)
    }

    /// The table of the embedding, which a tied head multiplies with.
    pub fn table(&self) -> ParamId {
        EMBED
    }

    /// The count for the whole model.
    pub fn parameter_count(&self) -> u64 {
        let own = self.specs.iter().filter(|spec| !spec.is_derived && !spec.is_constant);
        own.map(|spec| spec.whole.iter().product::<usize>() as u64).sum()
    }
}
