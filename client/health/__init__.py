"""How this node is: checks beside training, each bounded in time (rules G11, G12). Never on its critical path."""
