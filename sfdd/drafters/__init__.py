"""The draft models: architecture, config, load, save."""
