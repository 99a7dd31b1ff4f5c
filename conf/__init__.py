"""The configuration: YAML files that Hydra composes, and the dataclasses that check them (`schema`)."""
