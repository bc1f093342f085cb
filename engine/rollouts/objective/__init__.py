"""The loss of policy gradients."""
