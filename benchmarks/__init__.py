"""Speed, measured: see docs/performance.md. Programs to run by hand; nothing here is a test or is installed."""
