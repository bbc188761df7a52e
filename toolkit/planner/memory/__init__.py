"""Memory of a device, of its host and of drives, part by part and engine by engine; arithmetic only."""
