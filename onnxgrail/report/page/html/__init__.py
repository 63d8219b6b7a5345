"""Parts of an HTML page: markup, tables, drawings."""
