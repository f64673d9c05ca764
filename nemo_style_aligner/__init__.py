"""RLHF for Megatron-Core models: PPO with a refitted generation engine, SFT and reward models."""

__version__ = "0.1.0"
