"""Parts of all commands that write: checked paths, and the folder of a run that can be continued."""
