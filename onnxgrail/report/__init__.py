"""The report of a run: built from the results of all stages, shown as JSON, text or page."""
