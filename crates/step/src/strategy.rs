//! How a model is run, as one plain value. A person writes it, or a simulation chooses it; all code that computes, predicts or
//! reports a step reads it.

use std::fmt;
use std::ops::Range;

use evenkeel_device::{DType, DeviceKind};
use evenkeel_model::{Cut, Model, ZeroSharding, ZeroStage};
use serde::{Deserialize, Serialize};

use crate::mesh::Mesh;
use crate::pipeline::Pipeline;
use crate::schedule::Arrangement;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Strategy {
    /// Places of the pipeline.
    pub pp: usize,
    /// Replicas of the data.
    pub dp: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches that each replica computes in a step.
    pub accumulate: usize,
    pub zero: ZeroStage,
    /// The compute dtype.
    #[serde(with = "dtype")]
    pub dtype: DType,
    /// The shards of every layer: their number, their widths, and whether they split the stream.
    pub cut: Cut,
    pub arrangement: Arrangement,
    /// The stages at the places of the pipeline.
    #[serde(default, skip_serializing_if = "Pipeline::is_absent")]
    pub pipeline: Pipeline,
    pub devices: Devices,
}

/// The devices that ranks compute on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Devices {
    Cpu {
        cores_per_rank: usize,
        /// Additional cores of each rank that only exchange.
        comm_cores: usize,
    },
    Cuda {
        /// The number of each rank's GPU.
        gpus: Vec<usize>,
        /// By rank: the multiprocessors that it has for itself; empty if ranks share all of a GPU's.
        multiprocessors: Vec<u32>,
        /// Whether repeated work is replayed as CUDA graphs.
        graph: bool,
    },
}

impl Strategy {
    /// One replica of micro-batches of one sample, computed in f32 with one core for each shard and nothing recomputed.
    pub fn of(cut: Cut) -> Strategy {
        Strategy {
            pp: 1,
            dp: 1,
            micro_batch: 1,
            accumulate: 1,
            zero: ZeroStage::Nothing,
            dtype: DType::F32,
            cut,
            arrangement: Arrangement::default(),
            pipeline: Pipeline::default(),
            devices: Devices::Cpu { cores_per_rank: 1, comm_cores: 0 },
        }
    }

    /// A whole model on one rank.
    pub fn alone(dtype: DType) -> Strategy {
        Strategy { dtype, ..Strategy::of(Cut::even(1)) }
    }

    pub fn with_replicas(self, dp: usize, zero: ZeroStage) -> Strategy {
        Strategy { dp, zero, ..self }
    }

    /// The model cut in these stages, over so many places.
    pub fn in_stages(self, pp: usize, pipeline: Pipeline) -> Strategy {
        assert!(pipeline.stages().is_multiple_of(pp), "{} stages over {pp} places", pipeline.stages());
        Strategy { pp, pipeline, ..self }
    }

    /// The same with stages that begin at these units.
    pub fn cut_at(mut self, cuts: &[usize]) -> Strategy {
        assert_eq!(cuts.len(), self.pipeline.cuts.len(), "as many stages as before");
        self.pipeline.cuts = cuts.to_vec();
        self
    }

    /// The part of a model that a rank computes with: its stages of its shard. `shards` are those of the cut.
    pub fn model(&self, shards: &[Model], rank: usize) -> Model {
        let shard = &shards[self.mesh().shard(rank)];
        if self.pp == 1 { shard.clone() } else { shard.stages(&self.units(rank, shard.units.len())) }
    }

    /// The units that a rank computes, of so many, stage by stage.
    pub fn units(&self, rank: usize, of: usize) -> Vec<Range<usize>> {
        let stages = self.pipeline.stages_at(self.mesh().place(rank), self.pp);
        stages.into_iter().map(|stage| self.pipeline.units(stage, of)).collect()
    }

    pub fn arranged(self, arrangement: Arrangement) -> Strategy {
        Strategy { arrangement, ..self }
    }

    pub fn mesh(&self) -> Mesh {
        Mesh { pp: self.pp, dp: self.dp, tp: self.cut.weights.len() }
    }

    pub fn ranks(&self) -> usize {
        self.mesh().ranks()
    }

    /// Micro-batches of a step, all replicas together.
    pub fn micros_per_step(&self) -> usize {
        self.accumulate * self.dp
    }

    /// The part of its shard's state that a rank keeps.
    pub fn zero_sharding(&self, rank: usize) -> ZeroSharding {
        ZeroSharding::new(self.zero, self.mesh().replica(rank), self.dp)
    }
}

impl Devices {
    pub fn kind(&self) -> DeviceKind {
        match self {
            Devices::Cpu { .. } => DeviceKind::Cpu,
            Devices::Cuda { .. } => DeviceKind::Cuda,
        }
    }

    /// Cores that a rank computes with; one for a rank on a GPU.
    pub fn cores_per_rank(&self) -> usize {
        match *self {
            Devices::Cpu { cores_per_rank, .. } => cores_per_rank,
            Devices::Cuda { .. } => 1,
        }
    }

    /// Whether several ranks each have a GPU of their own.
    pub fn are_separate_gpus(&self) -> bool {
        matches!(self, Devices::Cuda { gpus, .. } if gpus.iter().any(|gpu| *gpu != gpus[0]))
    }
}

/// The axes and devices in a few words; nothing for one rank on cores.
impl fmt::Display for Strategy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mesh { pp, dp, tp } = self.mesh();
        let axes = [("pp", pp), ("dp", dp), ("tp", tp)].into_iter().filter(|(_, size)| *size > 1);
        let mut words: Vec<String> = Vec::new();
        let axes: Vec<String> = axes.map(|(name, size)| format!("{name} {size}")).collect();
        if !axes.is_empty() {
            words.push(axes.join(" × "));
        }
        if self.zero > ZeroStage::Nothing && dp > 1 {
            words.push(format!("ZeRO {}", self.zero.number()));
        }
        match &self.devices {
            Devices::Cpu { .. } if words.is_empty() => {}
            Devices::Cpu { cores_per_rank, .. } => {
                let last = words.last_mut().expect("it is not empty");
                last.push_str(&format!(" × {cores_per_rank} core{}", if *cores_per_rank == 1 { "" } else { "s" }));
            }
            devices @ Devices::Cuda { .. } if devices.are_separate_gpus() => {
                words.push("each rank on a GPU".to_owned())
            }
            Devices::Cuda { multiprocessors, .. } if multiprocessors.is_empty() => words.push("on a GPU".to_owned()),
            Devices::Cuda { multiprocessors, .. } => {
                words.push(format!("on parts of {multiprocessors:?} multiprocessors of a GPU"));
            }
        }
        out.write_str(&words.join(", "))
    }
}

/// A dtype by its name.
mod dtype {
    use evenkeel_device::DType;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if *dtype == DType::F32 { "f32" } else { "bf16" })
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::Bf16),
            other => Err(D::Error::custom(format!("`{other}` is no dtype to compute in: f32 or bf16"))),
        }
    }
}
