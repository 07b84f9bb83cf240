//! Proof of the job's secret.
