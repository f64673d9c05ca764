"""What trains: algorithms, models, checkpoints, the services, and the jobs that they make up."""
