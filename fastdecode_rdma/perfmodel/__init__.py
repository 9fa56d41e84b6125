"""Performance model: shapes, hardware, planner, simulator and measured profiles. No torch."""
