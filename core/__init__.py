"""Policy and orchestration: requests, scheduler, engine, model, executors."""
