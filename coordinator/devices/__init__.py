"""The devices of the home: connections, health and measured profiles."""
