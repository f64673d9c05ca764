"""The command line ``nsa``: what a person asks of models, data and machines. Training has scripts of its own."""
