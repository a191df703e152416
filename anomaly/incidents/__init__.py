"""How anomalies become incidents: grouped, ranked, said in plain words."""
