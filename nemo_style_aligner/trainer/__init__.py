"""What trains: reinforcement learning, supervised steps, models, checkpoints, the services and the jobs they make up."""
