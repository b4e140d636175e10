{{- define "chorus.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "chorus.selector" -}}
app.kubernetes.io/name: chorus
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "chorus.labels" -}}
{{ include "chorus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

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
{{- if and .Values.adapterSync.enabled (not .Values.adapterSync.image) -}}
{{- fail "adapterSync.enabled needs adapterSync.image" -}}
{{- end -}}
{{- end -}}
