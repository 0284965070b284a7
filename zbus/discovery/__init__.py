"""Who is there: hints over the hub for speed, the registry for truth."""
