//! State on its way from one layout to another: each rank gets its new elements from a rank that keeps them now.

use std::ops::Range;
use std::time::Instant;

use evenkeel_comm::Group;
use evenkeel_device::{DType, Device, Tensor, View};
use evenkeel_model::{
    Held, Model, MoveBlock, ParamId, ParamSpec, Slice, Stretch, ZeroSharding, blocks, moves, own_stretches,
};
use evenkeel_step::Strategy;

/// The part of a model's state that one rank keeps.
#[derive(Clone, PartialEq)]
pub(crate) struct Keeping(Vec<Kept>);

/// The part of a parameter that a rank keeps.
#[derive(Clone, PartialEq)]
struct Kept {
    /// Columns of the whole parameter.
    cols: usize,
    /// The elements, and where they lie; `None` if others keep it all.
    own: Option<(Held, Lies)>,
}

/// A place among the kept elements of a bucket.
#[derive(Clone, PartialEq)]
struct Lies {
    bucket: usize,
    place: Range<usize>,
}

impl Keeping {
    /// By rank.
    pub fn of_all(shards: &[Model], strategy: &Strategy) -> Vec<Keeping> {
        let of = |rank: usize| Keeping::of(&strategy.model(shards, rank), strategy.zero_sharding(rank));
        (0..strategy.ranks()).map(of).collect()
    }

    fn of(model: &Model, split: ZeroSharding) -> Keeping {
        let kept = |(own, spec): (Option<(usize, Stretch)>, &ParamSpec)| Kept {
            cols: spec.whole[1],
            own: own.map(|(bucket, Stretch { elements, place })| {
                (Held { slice: spec.slice.clone(), range: elements }, Lies { bucket, place })
            }),
        };
        Keeping(own_stretches(model, split).into_iter().zip(&model.specs).map(kept).collect())
    }

    /// A rank that has one parameter whole, alone in the first bucket, or nothing.
    pub fn of_one(specs: &[ParamSpec], owned: Option<ParamId>) -> Keeping {
        let kept = |(id, spec): (usize, &ParamSpec)| {
            let all = Held::all(Slice::whole(spec.whole));
            let place = 0..all.len();
            let own = (owned == Some(ParamId(id))).then_some((all, Lies { bucket: 0, place }));
            Kept { cols: spec.whole[1], own }
        };
        Keeping(specs.iter().enumerate().map(kept).collect())
    }
}

/// One rank's part in a move of state between all ranks: what it sends to whom, and what it receives from whom.
pub(crate) struct Route {
    sent: Vec<(usize, Spot)>,
    received: Vec<(usize, Spot)>,
}

/// Rows in the flat of a bucket.
struct Spot {
    bucket: usize,
    first: usize,
    shape: [usize; 2],
    stride: usize,
}

impl Route {
    /// From the layout `from` to the layout `to`, for the parameters that are moved.
    pub fn new(from: &[Keeping], to: &[Keeping], me: usize, is_moved: impl Fn(ParamId) -> bool) -> Route {
        let mut route = Route { sent: Vec::new(), received: Vec::new() };
        for parameter in (0..to[me].0.len()).filter(|&parameter| is_moved(ParamId(parameter))) {
            for receiver in 0..to.len() {
                parcels(from, to, parameter, receiver, |sender, block, kept_from, kept_to| {
                    if sender == me {
                        route.sent.push((receiver, Spot::of(kept_from, block.from_rows())));
                    }
                    if receiver == me {
                        route.received.push((sender, Spot::of(kept_to, block.to_rows())));
                    }
                });
            }
        }
        route
    }

    /// Fills flats of buckets, [1, n], from those of the previous layout.
    pub fn run(&self, from: &[Option<Tensor>], to: &[Option<Tensor>], everybody: &Group, device: &Device) {
        let seen = |spots: &[(usize, Spot)], flats: &[Option<Tensor>]| -> Vec<(usize, View)> {
            spots.iter().map(|(peer, spot)| (*peer, spot.of_flat(flats))).collect()
        };
        let (compute, comm) = (device.compute(), device.comm());
        comm.wait(&compute.record());
        everybody.redistribute(comm, &seen(&self.sent, from), &seen(&self.received, to));
        compute.wait(&comm.record());
    }
}

impl Spot {
    /// The rows of a block among the kept elements of a parameter.
    fn of(kept: &Kept, (first, shape, stride): (usize, [usize; 2], usize)) -> Spot {
        let (_, Lies { bucket, place }) = kept.own.as_ref().expect("a block lies in something that is kept");
        Spot { bucket: *bucket, first: place.start + first, shape, stride }
    }

    fn of_flat(&self, flats: &[Option<Tensor>]) -> View {
        let flat = flats[self.bucket].as_ref().expect("what is moved is there");
        flat.view().block(self.first, self.shape, self.stride)
    }
}

/// The parcels of a parameter for a rank: its own elements from itself, the rest from the first rank after it that has them.
fn parcels(
    from: &[Keeping],
    to: &[Keeping],
    parameter: usize,
    receiver: usize,
    mut parcel: impl FnMut(usize, &MoveBlock, &Kept, &Kept),
) {
    let kept_to = &to[receiver].0[parameter];
    let Some((wanted, _)) = &kept_to.own else { return };
    let ranks = from.len();
    let senders = (0..ranks).map(|distance| (receiver + distance) % ranks);
    let keepers = senders.filter_map(|rank| Some((rank, from[rank].0[parameter].own.as_ref()?.0.clone())));
    let (senders, held): (Vec<usize>, Vec<Held>) = keepers.unzip();
    let moves = moves(&held, wanted, kept_to.cols).expect("the ranks keep every element of a parameter");
    for block in blocks(&moves) {
        let sender = senders[block.from];
        parcel(sender, &block, &from[sender].0[parameter], kept_to);
    }
}

/// Seconds per byte sent to the next rank while all ranks send.
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
    // The first exchange may find memory and links asleep.
    (0..TIMES).map(exchange).skip(1).fold(f64::INFINITY, f64::min) / (4 * ELEMENTS) as f64
}
