"""Checkpoints on disk: process images and application checkpoints."""
