"""What is written and shown about a run; reads and writes a work directory, nothing else."""
