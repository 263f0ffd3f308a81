"""CNI formats: configurations, results and errors of every version."""
