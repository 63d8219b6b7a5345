"""Ways to decide a block: each turns a `View` and a width into a `Change`."""
