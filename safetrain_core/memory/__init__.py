"""What fits: recomputing activations, counting what that saves and costs, and planning it for a budget."""
