"""What ``controller.rollout`` is made of: pure machines for limits, tasks and routes, and a thin driver around them."""
