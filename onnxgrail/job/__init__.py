"""What every command that writes needs: checked paths, and the folder of a run that may be killed."""
