//! A strategy is plain data: reading it back gives what was written.

use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Part, SHARES, Widths, ZeroStage};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS_REFERENCE, OASES, Units};
use evenkeel_step::{Devices, Strategy};

fn strategies() -> Vec<Strategy> {
    let widths = Widths::new(|dim| match dim {
        Dim::Heads => vec![2 * SHARES, SHARES],
        Dim::Columns => vec![64, 32],
        Dim::Classes => vec![100, 28],
        Dim::Inputs => vec![0, 0],
        Dim::Tokens => vec![3, 2],
    });
    let planned = Cut { uncut: [Part::Embedding, Part::Attention(3), Part::Head].into(), ..Cut::even(4) };
    let uneven = Cut { widths: Some(widths), split_sequence: true, ..Cut::weighted(vec![2.0, 1.0]) };
    let gpus = Devices::Cuda { gpus: vec![0; 4], multiprocessors: vec![40, 40, 24, 16], graph: true };
    vec![
        Strategy::alone(DType::F32),
        Strategy { accumulate: 3, micro_batch: 8, ..Strategy::of(uneven).with_replicas(2, ZeroStage::Gradients) }
            .arranged(Arrangement { ahead: true, ..Arrangement::of(OASES).in_parts(2).recomputing(Units::Mlp) }),
        Strategy { dtype: DType::Bf16, devices: gpus, ..Strategy::of(planned) }
            .arranged(Arrangement::of(CROSS_PASS_REFERENCE).blocking()),
    ]
}

#[test]
fn what_is_written_as_toml_or_json_is_read_back() {
    for strategy in strategies() {
        let text = toml::to_string(&strategy).unwrap();
        assert_eq!(toml::from_str::<Strategy>(&text).unwrap(), strategy, "{text}");
        let json = serde_json::to_value(&strategy).unwrap();
        assert_eq!(serde_json::from_value::<Strategy>(json).unwrap(), strategy);
    }
}

#[test]
fn what_is_not_understood_is_refused() {
    let text = toml::to_string(&Strategy::alone(DType::F32)).unwrap();
    for (from, to, expected) in [
        ("dp = 1", "dp = 1\nep = 2", "ep"),
        ("zero = 0", "zero = 4", "ZeRO has no stage 4"),
        ("\"f32\"", "\"f16\"", "`f16` is no dtype"),
        ("\"none\"", "\"fastest\"", "there is no schedule `fastest`"),
        ("kind = \"cpu\"", "kind = \"tpu\"", "tpu"),
    ] {
        assert!(text.contains(from), "{text}");
        let error = toml::from_str::<Strategy>(&text.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_strategy_says_in_a_line_where_its_ranks_are() {
    let said: Vec<String> = strategies().iter().map(Strategy::to_string).collect();
    assert_eq!(
        said,
        ["", "dp 2 × tp 2, ZeRO 2 × 1 core", "tp 4, on parts of [40, 40, 24, 16] multiprocessors of a GPU",]
    );
}
