//! State on its way from one layout to another: whoever is to keep an element gets it from one that keeps it now.

use std::ops::Range;
use std::time::Instant;

use evenkeel_comm::Group;
use evenkeel_device::{DType, Device, Tensor, View};
use evenkeel_model::{Block, Held, Model, Split, blocks, moves, own_stretches};
use evenkeel_step::Mesh;

/// What one rank keeps of a model's state.
#[derive(PartialEq)]
pub(crate) struct Keeping(Vec<Kept>);

/// What a rank keeps of a parameter.
#[derive(PartialEq)]
struct Kept {
    bucket: usize,
    /// Columns of the whole parameter.
    cols: usize,
    /// Which elements, and where they lie in what is kept of the bucket; none where others keep it all.
    own: Option<(Held, Range<usize>)>,
}

impl Keeping {
    /// Of all ranks of a mesh, in their order.
    pub fn of_all(shards: &[Model], mesh: &Mesh, zero: usize) -> Vec<Keeping> {
        (0..mesh.ranks())
            .map(|rank| Keeping::of(&shards[mesh.shard(rank)], Split::zero(zero, mesh.share(rank), mesh.dp)))
            .collect()
    }

    fn of(model: &Model, split: Split) -> Keeping {
        let kept = |((bucket, stretch), spec): ((usize, Option<_>), &evenkeel_model::ParamSpec)| Kept {
            bucket,
            cols: spec.whole[1],
            own: stretch.map(|stretch: evenkeel_model::Stretch| {
                (Held { slice: spec.slice.clone(), range: stretch.elements }, stretch.place)
            }),
        };
        Keeping(own_stretches(model, split).into_iter().zip(&model.specs).map(kept).collect())
    }
}

/// A move of state between all ranks.
pub(crate) struct Relocation<'a> {
    pub from: &'a [Keeping],
    pub to: &'a [Keeping],
    pub everybody: &'a Group,
    pub device: &'a Device,
}

impl Relocation<'_> {
    /// Fills the flats of all buckets, f32 [1, n], from those of the layout before.
    pub fn run(&self, from: &[Tensor], to: &[Tensor]) {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let me = self.everybody.rank();
        for parameter in 0..self.to[me].0.len() {
            for receiver in 0..self.to.len() {
                self.parcels(parameter, receiver, |sender, block, kept_from, kept_to| {
                    if sender == me {
                        sent.push((receiver, seen(&from[kept_from.bucket], kept_from, block.from_rows())));
                    }
                    if receiver == me {
                        received.push((sender, seen(&to[kept_to.bucket], kept_to, block.to_rows())));
                    }
                });
            }
        }
        let (compute, comm) = (self.device.compute(), self.device.comm());
        comm.wait(&compute.record());
        self.everybody.redistribute(comm, &sent, &received);
        compute.wait(&comm.record());
    }

    /// What a rank is to get of a parameter: from itself what it has, the rest from the first of the others after it.
    fn parcels(&self, parameter: usize, receiver: usize, mut parcel: impl FnMut(usize, &Block, &Kept, &Kept)) {
        let kept_to = &self.to[receiver].0[parameter];
        let Some((wanted, _)) = &kept_to.own else { return };
        let ranks = self.from.len();
        let senders = (0..ranks).map(|distance| (receiver + distance) % ranks);
        let keepers = senders.filter_map(|rank| Some((rank, self.from[rank].0[parameter].own.as_ref()?.0.clone())));
        let (senders, held): (Vec<usize>, Vec<Held>) = keepers.unzip();
        let moves = moves(&held, wanted, kept_to.cols).expect("the ranks keep every element of a parameter");
        for block in blocks(&moves) {
            let sender = senders[block.from];
            parcel(sender, &block, &self.from[sender].0[parameter], kept_to);
        }
    }
}

/// The rows of a block in what is kept of a parameter.
fn seen(flat: &Tensor, kept: &Kept, (first, shape, stride): (usize, [usize; 2], usize)) -> View {
    let (_, place) = kept.own.as_ref().expect("a block lies in something that is kept");
    flat.view().block(place.start + first, shape, stride)
}

/// What it takes to hand the next rank a byte while all do.
pub(crate) fn exchange_s_per_byte(everybody: &Group, device: &Device) -> f64 {
    const ELEMENTS: usize = 1 << 20;
    const TIMES: usize = 4;
    let (comm, me, ranks) = (device.comm(), everybody.rank(), everybody.size());
    let (to, from) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let [sent, received] = [(); 2].map(|()| comm.zeros(1, ELEMENTS, DType::F32));
    let exchange = |_| {
        comm.finish();
        let start = Instant::now();
        everybody.redistribute(comm, &[(to, sent.view())], &[(from, received.view())]);
        comm.finish();
        start.elapsed().as_secs_f64()
    };
    // The first one may find memory and links asleep.
    (0..TIMES).map(exchange).skip(1).fold(f64::INFINITY, f64::min) / (4 * ELEMENTS) as f64
}
