"""The machine: files, devices, memory, processes, and the steps of a run that may be killed."""
