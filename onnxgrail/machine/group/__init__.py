"""Several processes that share one job."""
