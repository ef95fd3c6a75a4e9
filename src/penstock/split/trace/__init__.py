"""Recording a model's forward, and cutting it into stages."""
