//! Requests and answers as data: ranks that are sent what has been text answer as others do.

mod support;

use evenkeel_balance::Selection;
use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Imputation, Model, ParamId, widths_of};
use evenkeel_train::{
    Answer, Error, OptimizerOptions, Prune, Ranks, Request, StateKind, TrainerOptions, WantedElements,
};
use support::{micros, random};

fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 64,
    });
    Model::from_json(&config).unwrap()
}

fn ranks(model: &Model) -> Ranks {
    let optimizer = Some(OptimizerOptions::default());
    let options = TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 0 };
    random(model, &Cut::even(2), options, DType::F32)
}

/// One of each kind, in an order that ranks can follow.
fn requests(model: &Model) -> Vec<Request> {
    let of_shards = |cut: &Cut| widths_of(model.cut(cut).unwrap().iter().map(|shard| &shard.shard));
    let uneven = Cut { weights: vec![3.0, 1.0], ..Cut::even(2) };
    // Only heads and columns migrate.
    let work = of_shards(&uneven).with(Dim::Columns, of_shards(&Cut::even(2)).of(Dim::Columns).to_vec());
    let prune = Prune {
        gamma: 0.25,
        imputation: Imputation::Zero,
        freeze: true,
        selection: Selection::Random,
        period_steps: 1,
        seed: 3,
    };
    let stretch = WantedElements { elements: 1..4, to_start: 0 };
    vec![
        Request::Throttle { factors: vec![1.0, 1.5] },
        Request::Step { micros: micros(model, 0), lr: 1e-3, is_observed: false },
        Request::Evaluate { samples: micros(model, 1).remove(0) },
        Request::Reshard { cut: uneven },
        Request::Step { micros: micros(model, 1), lr: 1e-3, is_observed: false },
        Request::Migrate { work: Some(work) },
        Request::Prune { by_shard: vec![None, None] },
        Request::Step { micros: micros(model, 2), lr: 1e-3, is_observed: false },
        Request::Migrate { work: None },
        Request::Prune { by_shard: vec![None, Some(prune)] },
        Request::Step { micros: micros(model, 3), lr: 1e-3, is_observed: false },
        Request::CompleteValues,
        Request::Read { kind: StateKind::Mean, id: ParamId(1), by_rank: vec![vec![stretch], Vec::new()] },
        Request::State { copies: true },
        Request::State { copies: false },
        Request::GraphRefusal,
        Request::Memory,
        // Measured, and so another number every time.
        Request::Step { micros: micros(model, 4), lr: 1e-3, is_observed: true },
        Request::TimedStep { micros: micros(model, 5), lr: 1e-3 },
        Request::ExchangeSpeed,
        Request::PeakFlops,
    ]
}

fn is_measured(answer: &Answer, request: &Request) -> bool {
    matches!(answer, Answer::ExchangeSpeed(_) | Answer::PeakFlops(_))
        || matches!(request, Request::Step { is_observed: true, .. } | Request::TimedStep { .. })
}

#[test]
fn every_request_and_every_answer_is_the_same_after_it_was_json() {
    let model = llama();
    let [near, far] = [(); 2].map(|()| ranks(&model));
    for (here, there) in requests(&model).into_iter().zip(requests(&model)) {
        let sent = serde_json::to_string(&there).unwrap();
        let received: Request = serde_json::from_str(&sent).unwrap();
        assert_eq!(serde_json::to_string(&received).unwrap(), sent);
        let answers = far.ask(received).unwrap();
        let returned: Vec<Answer> = serde_json::from_str(&serde_json::to_string(&answers).unwrap()).unwrap();
        assert_eq!(returned, answers, "{sent}");
        let is_measured = is_measured(&answers[0], &there);
        let expected = near.ask(here).unwrap();
        assert!(is_measured || returned == expected, "{sent}: {returned:?}, expected {expected:?}");
    }
}

#[test]
fn an_error_of_a_rank_keeps_its_words_its_hint_and_whose_fault_it_is() {
    let error = Error::DifferentSamples { ranks: [0, 1] };
    let sent = serde_json::to_string(&evenkeel_train::ErrorText::from(&error)).unwrap();
    let received = Error::OnRank(serde_json::from_str(&sent).unwrap());
    assert_eq!(received.to_string(), error.to_string());
    assert_eq!(received.hint(), error.hint());
    assert_eq!(received.is_fault(), error.is_fault());
}

#[test]
fn a_timed_step_is_the_same_step_and_says_where_the_time_of_each_rank_goes() {
    let model = llama();
    let [plain, timed] = [(); 2].map(|()| ranks(&model));
    for step in 0..2 {
        let expected = plain.step(micros(&model, step), 1e-3).unwrap();
        let (outcome, times) = timed.timed_step(micros(&model, step), 1e-3).unwrap();
        assert_eq!((outcome, times.len()), (expected, 2));
        assert!(times.iter().all(|rank| rank.compute_s > 0.0 && rank.transfer_s > 0.0), "{times:?}");
        assert!(times.iter().all(|rank| rank.exposed_s <= rank.transfer_s + rank.waiting_s + 1e-9), "{times:?}");
    }
}
