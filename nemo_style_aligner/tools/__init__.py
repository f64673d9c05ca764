"""What people use beside training: the command line, plans, evaluation, reports."""
