"""From a Problem to a launch: plans, copies of matrices, and the direct launch."""
