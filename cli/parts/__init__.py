"""Parts that commands share: options, progress, tables."""
