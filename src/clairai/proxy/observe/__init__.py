"""What the proxy reports about itself: metrics, telemetry and logs."""
