"""`gracecl bench`: what gracecl costs, as ratios measured side by side. One module per part."""
