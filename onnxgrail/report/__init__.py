"""The report of a run: built from what every stage returned, shown as JSON, text or page."""
