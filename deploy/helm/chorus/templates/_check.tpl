{{- /* Combinations that the schema can't refuse. */ -}}
{{- define "chorus.check" -}}
{{- if and .Values.adapters.uploads.enabled (or (gt (int .Values.replicas) 1) (ne .Values.autoscaling.kind "none")) -}}
{{- fail "adapters.uploads.enabled needs replicas: 1 and autoscaling.kind: none; uploads belong to one server" -}}
{{- end -}}
{{- if and (not .Values.keys.apiKeys) (not .Values.keys.allowUnauthenticated) -}}
{{- fail "keys.apiKeys is empty; name the entry of keys.secret with the clients' keys, or set keys.allowUnauthenticated" -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.prometheus) -}}
{{- fail "autoscaling.kind is keda, which asks Prometheus; set autoscaling.prometheus to its address" -}}
{{- end -}}
{{- include "chorus.check.adapterSync" . -}}
{{- end -}}

{{- define "chorus.check.adapterSync" -}}
{{- if .Values.adapterSync.enabled -}}
{{- if not .Values.adapterSync.image -}}
{{- fail "adapterSync.enabled needs adapterSync.image" -}}
{{- end -}}
{{- if or .Values.keys.apiKeys .Values.keys.adminKeys -}}
{{- fail "adapterSync.enabled is set, but its sidecar sends no key; empty keys.apiKeys and keys.adminKeys, and set keys.allowUnauthenticated" -}}
{{- end -}}
{{- $roots := .Values.adapters.roots | default (without (list .Values.adapters.path) "") -}}
{{- if not $roots -}}
{{- fail "adapterSync.enabled needs adapters.roots, the directories that adapters may be loaded from" -}}
{{- end -}}
{{- range .Values.adapterSync.adapters -}}
{{- $source := clean .source -}}
{{- $isBelow := not (isAbs $source) -}}
{{- range $roots -}}
{{- $isBelow = or $isBelow (eq $source (clean .)) (hasPrefix (printf "%s/" (clean .)) $source) -}}
{{- end -}}
{{- if not $isBelow -}}
{{- fail (printf "adapterSync.adapters has the source %s, which lies outside %s; name its directory in adapters.roots" .source (join ", " $roots)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
