"""GRASP: replaces matrices of redundant layers by the few singular directions that matter to the loss."""
