"""GRASP: the matrices of redundant layers, replaced by their few singular directions that matter to the loss."""
