//! A step of ranks that NCCL connects against the same step in the memory of the GPU that they share.

mod support;

use evenkeel_comm::Options;
use evenkeel_device::DType;
use evenkeel_model::Cut;
use evenkeel_step::schedule::{Arrangement, NONE, OASES};
use support::ranks::{Way, on_ranks};
use support::{nccl, on_cuda};

#[test]
fn a_step_over_nccl_has_the_bits_of_one_in_the_cards_memory() {
    if !on_cuda() || nccl::folder().is_none() {
        return println!("skipped: no EVENKEEL_TEST_NCCL, or the device under test is the CPU");
    }
    let over_nccl = Options { library_of_rank: Some(nccl::library_of_rank), ..Options::default() };
    let uneven = Cut { split_sequence: true, ..Cut::weighted(vec![3.0, 1.0]) };
    let cases = [
        (uneven.clone(), Way::from(Arrangement::of(OASES).in_parts(2))),
        (Cut::even(2), Way { dp: 2, ..Arrangement::of(NONE).into() }),
        (uneven, Way { dp: 2, zero: 3, ..Arrangement::of(OASES).in_parts(2).into() }),
    ];
    for (cut, way) in cases {
        let [expected, found] =
            [&Options::default(), &over_nccl].map(|options| on_ranks("llama3", &cut, DType::F32, way, options));
        for (rank, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let what = format!("rank {rank}, tp {:?}, {way:?}", cut.weights);
            assert_eq!(found.losses, expected.losses, "{what}");
            assert!(found.gradient_bits() == expected.gradient_bits(), "gradients differ: {what}");
            assert!(found.spans.len() >= found.program.tasks.len(), "{what}: every task was traced");
        }
    }
}
