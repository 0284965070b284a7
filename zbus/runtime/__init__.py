"""What runs engines, in a worker process or inline: loader, context, executor, host, process identity."""
