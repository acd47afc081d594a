//! Every number of the balancer that was chosen rather than derived.

/// Thresholds, windows and weights. [`Tuning::default`] has the values that runs use.
///
/// "Simulated" means `tests/closed_loop.rs`, "recorded" means `tests/recorded.rs`; the measurements that both go back to are in
/// `bench/results/2026-11-16-stragglers.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Steps in the window that speeds are estimated from. Measured, one run each: with 16, a ViT beside a busy process waited
    /// 40 steps and more for proof of its straggler; with 24, it ended 3 to 9 % above the optimum.
    pub window_steps: usize,
    /// Deviations kept to estimate noise. Measured: noise taken only from the steps since a change missed the bounds of the
    /// straggler benchmark, noise taken from 64 steps kept them.
    pub deviations_kept: usize,
    /// Deviations below which noise, and so speeds, are unknown. Chosen, not measured.
    pub deviations_needed: usize,
    /// Fewest steps that a trimmed mean is taken of: it drops one hiccup out of three. Chosen, not measured.
    pub trimmed_mean_steps: usize,
    /// Steps in a layout before its speeds are used: a competing process that pauses for fewer has not gone. Chosen, not
    /// measured.
    pub settling_steps: usize,
    /// The quantile of the absolute deviations that noise is taken from: hiccups are rarer than one in five, and the median
    /// would miss the noise of a core that jumps between two speeds.
    pub noise_quantile: f64,
    /// That quantile of a normal distribution, in standard deviations.
    pub noise_quantile_deviations: f64,
    /// Smallest change of a rank's relative time that the change-point test accepts. Chosen, not measured; single steps vary by
    /// a fifth on the machine of the benchmark.
    pub change_least_share: f64,
    /// Standard errors that the change-point test asks for. Recorded: at three quarters of the proof, 25 to 40 of 720 runs act
    /// late instead of 55, and acting on noise costs 1.1 to 1.5 % instead of 0.9 %.
    pub change_standard_errors: f64,
    /// A rank with less than this share of an even width tells nothing of its speed: overhead dominates. Chosen, not measured.
    pub telling_width_share: f64,
    /// A task time at or above this is a failed measurement.
    pub credible_s_max: f64,

    /// Expected size of an overhead, as a share of an even width: the prior of its shrinkage estimate. Chosen, not measured.
    pub overhead_prior_share: f64,
    /// Largest base overhead that is believed, as a share of an even width. Chosen, not measured.
    pub base_share_max: f64,
    /// Widths that differ by a smaller share tell nothing of base overheads. Chosen, not measured.
    pub base_width_difference_least: f64,
    /// Share of the migrating overhead kept at each change of layout without migration. Chosen, not measured.
    pub migrating_kept_share: f64,

    /// A rank slower than the fastest by more than this factor is a straggler. Chosen, not measured.
    pub straggler_slowness: f64,
    /// Share of a step that a change must gain. Chosen, not measured; the benchmark's ratios are good to some hundredths.
    pub step_gain_least_share: f64,
    /// Share of a class's time that migrating it must gain to be worth its messages. Chosen, not measured.
    pub class_gain_least_share: f64,
    /// A smaller share to prune is noise. Chosen, not measured.
    pub gamma_least: f64,
    /// Prune limits tried between none and the largest allowed. Measured: with 8, a decision for 64 ranks takes 327 µs at most;
    /// more make it take milliseconds.
    pub prune_limits_tried: usize,
    /// Targets within this factor of the fastest compete on pruning least. Chosen, not measured.
    pub as_fast_factor: f64,

    /// Steps whose trimmed mean is the typical step. Chosen, not measured.
    pub typical_steps: usize,
    /// Steps in a layout after which its forecast is compared with what it took. Chosen, not measured.
    pub forecast_steps: usize,
    /// Weight of the newest forecast error in its exponential average. Chosen, not measured.
    pub forecast_error_weight: f64,
    /// Share of a forecast error that still counts: estimates have been corrected by it. Chosen, not measured.
    pub forecast_error_kept_share: f64,
    /// Weight of the newest first step of a layout in the exponential average of its extra time. Chosen, not measured.
    pub first_step_weight: f64,
    /// Seconds per byte exchanged until it is measured: a hundredth of memory's speed.
    pub exchange_s_per_byte: f64,
    /// Resharding takes so many times an exchange until it is measured: it also allocates state, writes it and copies it to
    /// compute weights.
    pub reshard_exchange_factor: f64,
    /// Weight of the newest reshard in the exponential average of its seconds per byte. Chosen, not measured.
    pub reshard_weight: f64,
    /// Weight of the newest step in the exponential averages of migration's seconds per byte and of the share that is not hidden.
    /// Chosen, not measured.
    pub migration_weight: f64,
    /// Share of migration's transfers that computation does not hide, until it is measured. Chosen, not measured.
    pub migration_exposed_share: f64,
    /// Slowness shorter than this may end as soon, so `auto` considers migrating; a return that lasts shorter came too early.
    /// Chosen, not measured.
    pub lasting_steps: u64,
    /// Slowness is expected to last at least so many steps. Chosen, not measured.
    pub expected_steps_least: u64,
    /// Steps in a row in which the usual target must suffice before the run returns to it: a competing process may pause, or
    /// compete only while the rank has much to do. Simulated, with all rules for returning: at most 6 of 100 runs are not back
    /// after twenty steps, where 62 were not.
    pub patience_steps_least: u64,
    /// Patience doubles up to this after returns that came too early. Chosen, not measured.
    pub patience_steps_most: u64,
    /// Leaving the usual target must gain so many times the uncertainty of two standard errors: it is considered in every step,
    /// so noise has many chances. Measured: 1.75 acts on noise more often; the same doubt for every other change kept one run in
    /// a poor layout for 107 steps.
    pub leaving_doubt: f64,
    /// The usual target suffices within this factor of the best. Chosen, not measured.
    pub usual_suffices_factor: f64,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            window_steps: 24,
            deviations_kept: 64,
            deviations_needed: 5,
            trimmed_mean_steps: 3,
            settling_steps: 5,
            noise_quantile: 0.8,
            noise_quantile_deviations: 1.28,
            change_least_share: 0.12,
            change_standard_errors: 3.0,
            telling_width_share: 0.1,
            credible_s_max: 1e6,
            overhead_prior_share: 0.2,
            base_share_max: 0.5,
            base_width_difference_least: 0.2,
            migrating_kept_share: 0.5,
            straggler_slowness: 1.15,
            step_gain_least_share: 0.03,
            class_gain_least_share: 0.02,
            gamma_least: 0.02,
            prune_limits_tried: 8,
            as_fast_factor: 1.01,
            typical_steps: 9,
            forecast_steps: 5,
            forecast_error_weight: 0.5,
            forecast_error_kept_share: 0.5,
            first_step_weight: 0.5,
            exchange_s_per_byte: 1e-9,
            reshard_exchange_factor: 2.0,
            reshard_weight: 0.5,
            migration_weight: 0.3,
            migration_exposed_share: 0.25,
            lasting_steps: 20,
            expected_steps_least: 3,
            patience_steps_least: 6,
            patience_steps_most: 160,
            leaving_doubt: 2.0,
            usual_suffices_factor: 1.1,
        }
    }
}
