"""Everything that knows an optimiser: the loss, the update, the mesh, checkpoints."""
