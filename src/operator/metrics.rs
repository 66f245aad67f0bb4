//! Metrics of the controllers, by the names that controller-runtime gave them, and the text that Prometheus reads.

use std::time::Instant;

use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// What the controllers count.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    total: IntCounterVec,
    errors: IntCounterVec,
    seconds: HistogramVec,
    active: IntGaugeVec,
    leading: IntGauge,
}

impl Metrics {
    /// A registry of its own.
    ///
    /// # Errors
    /// When a metric is registered twice, which a test rules out.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let total = IntCounterVec::new(
            Opts::new("controller_runtime_reconcile_total", "Reconciliations by controller and result."),
            &["controller", "result"],
        )?;
        let errors = IntCounterVec::new(
            Opts::new("controller_runtime_reconcile_errors_total", "Reconciliations that failed, by controller."),
            &["controller"],
        )?;
        let seconds = HistogramVec::new(
            HistogramOpts::new("controller_runtime_reconcile_time_seconds", "Seconds of a reconciliation.")
                .buckets(vec![0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]),
            &["controller"],
        )?;
        let active = IntGaugeVec::new(
            Opts::new("controller_runtime_active_workers", "Reconciliations under way, by controller."),
            &["controller"],
        )?;
        let leading = IntGauge::with_opts(Opts::new("leader_election_master_status", "1 while this replica leads."))?;
        registry.register(Box::new(total.clone()))?;
        registry.register(Box::new(errors.clone()))?;
        registry.register(Box::new(seconds.clone()))?;
        registry.register(Box::new(active.clone()))?;
        registry.register(Box::new(leading.clone()))?;
        Ok(Self { registry, total, errors, seconds, active, leading })
    }

    /// A reconciliation begins.
    #[must_use]
    pub fn begin(&self, controller: &'static str) -> Running<'_> {
        self.active.with_label_values(&[controller]).inc();
        Running { metrics: self, controller, began: Instant::now() }
    }

    /// Whether this replica leads.
    pub fn lead(&self, leading: bool) {
        self.leading.set(i64::from(leading));
    }

    /// What Prometheus reads.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }
}

/// A reconciliation under way.
#[derive(Debug)]
pub struct Running<'a> {
    metrics: &'a Metrics,
    controller: &'static str,
    began: Instant,
}

impl Running<'_> {
    /// It ended; `failed` is retried with growing waits.
    pub fn end(&self, failed: bool) {
        let result = if failed { "error" } else { "success" };
        self.metrics.total.with_label_values(&[self.controller, result]).inc();
        if failed {
            self.metrics.errors.with_label_values(&[self.controller]).inc();
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.metrics.active.with_label_values(&[self.controller]).dec();
        self.metrics.seconds.with_label_values(&[self.controller]).observe(self.began.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconciliations_are_counted_by_their_result() {
        let metrics = Metrics::new().unwrap();
        metrics.begin("gpupool").end(false);
        metrics.begin("gpupool").end(true);
        let text = metrics.text();
        assert!(
            text.contains(r#"controller_runtime_reconcile_total{controller="gpupool",result="error"} 1"#),
            "{text}"
        );
        assert!(text.contains(r#"controller_runtime_reconcile_errors_total{controller="gpupool"} 1"#));
        assert!(text.contains(r#"controller_runtime_reconcile_time_seconds_count{controller="gpupool"} 2"#));
        assert!(text.contains(r#"controller_runtime_active_workers{controller="gpupool"} 0"#));
    }
}
