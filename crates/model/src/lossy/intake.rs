//! Which linear layers can compute with some of their input columns, and which of them read the same values.

use crate::chain::body::Slot;
use crate::chain::linear::Linear;
use crate::chain::model::Model;
use crate::chain::op::Op;
use crate::chain::unit::{Unit, UnitKind};
use crate::parameters::ParamId;
use crate::sharding::layout::Sharing;

/// Values that some linear layers of a unit read together: queries, keys and values do, and so do gate and up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intake {
    /// The weights of the layers, in the order in which they are computed.
    pub weights: Vec<ParamId>,
    /// Its columns on this shard.
    pub inputs: usize,
    /// Whether the weights are stored [in, out].
    pub transposed: bool,
    /// The weights whose gradients are summed with other shards'.
    summed: Vec<ParamId>,
}

impl Intake {
    pub(crate) fn is_summed(&self, weight: ParamId) -> bool {
        self.summed.contains(&weight)
    }
}

impl Model {
    /// The intakes of the layers' trained linears, without embedding and head. Layers that every shard computes whole are left
    /// out: shards that computed them differently would come apart.
    pub fn intakes(&self) -> Vec<Intake> {
        let units = self.units.iter().filter(|unit| !matches!(unit.kind, UnitKind::Embedding | UnitKind::Head));
        units.flat_map(|unit| self.intakes_of(unit)).collect()
    }

    fn intakes_of(&self, unit: &Unit) -> Vec<Intake> {
        let sharing = |weight: ParamId| &self.specs[weight.0].sharing;
        // Layers of heads that are shared by samples use parts of their weights; those keep every column.
        let is_whole = |linear: &&Linear| linear.part.is_none() && !linear.adds;
        let is_of_this_shard = |linear: &&Linear| self.shard.count == 1 || *sharing(linear.weight) != Sharing::Same;
        let linears =
            unit.body().ops.iter().filter_map(|op| if let Op::Linear(linear) = op { Some(linear) } else { None });
        // Imputed gradients are those of all layers that read a slot.
        let is_frozen = |linear: &&Linear| !self.specs[linear.weight.0].is_trained;
        let read_frozen: Vec<Slot> = linears.clone().filter(is_frozen).map(|linear| linear.x).collect();
        let is_trained = |linear: &&Linear| !read_frozen.contains(&linear.x);
        let mut found: Vec<(Slot, Intake)> = Vec::new();
        for linear in linears.filter(is_whole).filter(is_trained).filter(is_of_this_shard) {
            let [rows, cols] = self.specs[linear.weight.0].matrix;
            let (transposed, inputs) = (linear.transposed, if linear.transposed { rows } else { cols });
            let at = found.iter().position(|(slot, _)| *slot == linear.x).unwrap_or_else(|| {
                found.push((linear.x, Intake { weights: Vec::new(), inputs, transposed, summed: Vec::new() }));
                found.len() - 1
            });
            let intake = &mut found[at].1;
            assert_eq!((intake.inputs, intake.transposed), (inputs, transposed), "layers that read the same");
            intake.weights.push(linear.weight);
            if matches!(sharing(linear.weight), Sharing::Summed(_)) {
                intake.summed.push(linear.weight);
            }
        }
        found.into_iter().map(|(_, intake)| intake).collect()
    }
}
