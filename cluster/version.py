"""The release that this code is, as pyproject.toml says. It also runs where nothing was installed."""

VERSION = "0.1.0"
