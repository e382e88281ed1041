"""What several processes share: parameters, sums, agreements."""
