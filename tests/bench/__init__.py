"""Speed of the gateway beside a direct call and a minimal proxy, measured in one run."""
