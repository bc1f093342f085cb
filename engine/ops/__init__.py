"""Differentiable operations. They take tensors, integers and an axis, never modules or configs.

Every op that has a trainable operand writes that operand's gradient into a `GradientSink` (fp32) and returns None to
autograd for it, so that gradients are accumulated once, in fp32, where the optimizer reads them.
"""
